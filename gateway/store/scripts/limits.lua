-- Loaded after common.lua by the limiter's scripts: what a tenant has used lately, and what gateways hold of its limits.
-- Use is counted in slots of a second. The slots in a window are the present one and the sixty before it, so that nothing
-- can hide at the edge of a minute: in any sixty seconds there is at most what the limit allows.
local SLOT, NUM_SLOTS = 1000000, 61
local DAY = 86400000000
local WINDOW_KEPT_MS = 62000
local DAY_KEPT_MS = 172800000
local RESERVATION_KEPT_MS = 600000
local SHARE_TAIL = 65000000 -- what was admitted from a share at its very end is in a window for so much longer

local STATE = PREFIX .. 'limits'
local RECALLED = PREFIX .. 'recalled'
local function window_key(tenant) return PREFIX .. 'window:' .. tenant end
local function day_key(tenant) return PREFIX .. 'day:' .. tenant end
local function running_key(tenant) return PREFIX .. 'running:' .. tenant end
local function shares_key(tenant) return PREFIX .. 'shares:' .. tenant end

-- Gives a request its concurrency slot for so many microseconds from now.
local function lease_slot(tenant, id, lease)
  call('ZADD', running_key(tenant), int(NOW + lease), id)
  call('PEXPIRE', running_key(tenant), int(math.ceil(lease / 1000)))
end

-- Whether leases of slots may have run out while nobody could renew them.
local function was_away(renewed_at, lease) return NOW - tonumber(renewed_at) > lease / 2 end

local function oldest_slot() return math.floor(NOW / SLOT) - NUM_SLOTS + 1 end

-- Fields of slots that may have left the window since the sums were made.
local function fields_before(key, from, oldest)
  local names = {}
  if oldest - from > NUM_SLOTS then
    for _, name in ipairs(call('HKEYS', key)) do
      local at = tonumber(string.match(name, '^[rt](%d+)$'))
      if at and at < oldest then names[#names + 1] = name end
    end
  else
    for slot = from, oldest - 1 do names[#names + 1], names[#names + 2] = 'r' .. int(slot), 't' .. int(slot) end
  end
  return names
end

-- Requests and tokens of the window, the fields that have left it, and "tat", the time of the rate's spacing. The sums are kept:
-- only what has left since they were made has to be looked at.
local function read_window(tenant)
  local key, oldest = window_key(tenant), oldest_slot()
  local r, t, from, tat = unpack(call('HMGET', key, 'r', 't', 'from', 'tat'))
  local window = { r = tonumber(r or '0'), t = tonumber(t or '0'), old = {}, tat = tonumber(tat or '0') }
  local names = from and tonumber(from) < oldest and fields_before(key, tonumber(from), oldest) or {}
  if #names == 0 then return window end
  for i, amount in ipairs(call('HMGET', key, unpack(names))) do
    if amount then
      local kind = string.sub(names[i], 1, 1)
      window[kind] = window[kind] - tonumber(amount)
      window.old[#window.old + 1] = names[i]
    end
  end
  return window
end

-- What counts against each limit now: requests and tokens of the window, running requests, tokens of a day.
local function read_used(tenant, window, day)
  local its_day, spent = unpack(call('HMGET', day_key(tenant), 'day', 'tokens'))
  return { window.r, window.t, call('ZCOUNT', running_key(tenant), '(' .. int(NOW), '+inf'),
    its_day == int(day) and tonumber(spent) or 0 }
end

-- The gateways' shares of a tenant's limits, by gateway. `amounts`: what is set aside of each limit; a share that was not
-- renewed counts until what was admitted from it has left the window, of a day until the day is over, and of concurrency also
-- for as long as a slot that was taken from it at its very end would be leased.
local function read_shares(tenant, day, slot_lease)
  local shares, fields = {}, call('HGETALL', shares_key(tenant))
  for i = 1, #fields, 2 do
    local numbers = {}
    for number in string.gmatch(fields[i + 1], '%d+') do numbers[#numbers + 1] = tonumber(number) end
    local share = { until_time = numbers[1], number = numbers[2], charged = numbers[3], day = numbers[8] }
    local counts = NOW < numbers[1] + SHARE_TAIL
    local counts_slots, counts_today = counts or NOW < numbers[1] + slot_lease, counts or day <= numbers[8]
    share.is_over = not (counts_slots or counts_today)
    share.amounts = { counts and numbers[4] or 0, counts and numbers[5] or 0, counts_slots and numbers[6] or 0,
      counts_today and numbers[7] or 0 }
    shares[fields[i]] = share
  end
  return shares
end

-- What all gateways hold together, or all but one.
local function sum_shares(shares, but)
  local sums = { 0, 0, 0, 0 }
  for gateway, share in pairs(shares) do
    if gateway ~= but then
      for i, amount in ipairs(share.amounts) do sums[i] = sums[i] + amount end
    end
  end
  return sums
end

local function write_share(tenant, gateway, share)
  local numbers = { share.until_time, share.number, share.charged, share.amounts[1], share.amounts[2], share.amounts[3],
    share.amounts[4], share.day }
  for i, number in ipairs(numbers) do numbers[i] = int(number) end
  call('HSET', shares_key(tenant), gateway, table.concat(numbers, ' '))
  call('PEXPIRE', shares_key(tenant), DAY_KEPT_MS)
end

-- Counts use of a time in the past: in its slot if that is in the window, and in its day unless that is over.
local function count_in_window(tenant, slot, requests, tokens)
  local key, oldest = window_key(tenant), oldest_slot()
  if slot < oldest then return end
  call('HSETNX', key, 'from', int(oldest))
  for kind, amount in pairs({ r = requests, t = tokens }) do
    if amount ~= 0 then
      call('HINCRBY', key, kind .. int(slot), int(amount))
      call('HINCRBY', key, kind, int(amount))
    end
  end
  call('PEXPIRE', key, WINDOW_KEPT_MS)
end

local function count_in_day(tenant, day, tokens)
  local its_day = tonumber(call('HGET', day_key(tenant), 'day') or '-1')
  if its_day > day then return end
  if its_day == day then
    call('HINCRBY', day_key(tenant), 'tokens', int(tokens))
  else
    call('HSET', day_key(tenant), 'day', int(day), 'tokens', int(tokens))
  end
  call('PEXPIRE', day_key(tenant), DAY_KEPT_MS)
end

local function write_reservation(id, owner, tokens, slot, day)
  call('HSET', reservation_key(id), 'owner', owner, 'tokens', int(tokens), 'slot', int(slot), 'day', int(day))
  call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS)
end

-- Replaces a reservation by what was used, and gives its concurrency slot back. Returns 0 if there is no reservation.
local function settle(tenant, id, used_tokens)
  local tokens, slot, day = unpack(call('HMGET', reservation_key(id), 'tokens', 'slot', 'day'))
  call('ZREM', running_key(tenant), id)
  if not tokens then return 0 end
  call('DEL', reservation_key(id))
  local unused = tonumber(tokens) - used_tokens
  -- What has left the window or belongs to another day is not there to be changed.
  if call('HEXISTS', window_key(tenant), 't' .. slot) == 1 then
    call('HINCRBY', window_key(tenant), 't' .. slot, int(0 - unused))
    call('HINCRBY', window_key(tenant), 't', int(0 - unused))
  end
  if call('HGET', day_key(tenant), 'day') == day then call('HINCRBY', day_key(tenant), 'tokens', int(0 - unused)) end
  return 1
end
