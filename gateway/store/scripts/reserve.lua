-- Takes a request's whole cost from every limit of its tenant, or nothing.
-- ARGV: 2 tenant, 3 request id, 4 tokens that it may use, then the limits, -1 for none: 5 requests per minute, 6 tokens per
--       minute, 7 concurrent requests, 8 tokens per day, 9 requests at once; 10 microseconds that the tenant's day is ahead
--       of UTC, 11 microseconds of the lease of its concurrency slot, 12 gateway, 13 generation of the store's content that
--       it knows or empty; then, if it gives its share of the limits back: 14 number of that call, 15 to 18 what it keeps
-- Returns {what refused it, microseconds until a retry may succeed or -1 for never, what is left of each limit or -1}; what
-- refused it is 0 for nothing, else the position of the limit: 1 requests, 2 tokens, 3 concurrency, 4 the day; 10 more if
-- only gateways' shares are in the way; -1 if the store may not count all that it should yet. A refusal charges nothing; one
-- by shares recalls them. An id that has a reservation is not charged again,
-- and is this gateway's from now on.
local tenant, id, tokens = ARGV[2], ARGV[3], tonumber(ARGV[4])
local limits = { tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]) }
local burst = tonumber(ARGV[9])
local slot, day = math.floor(NOW / SLOT), math.floor((NOW + tonumber(ARGV[10])) / DAY)
local lease, gateway, known = tonumber(ARGV[11]), ARGV[12], ARGV[13]
local SHARES_GO_IN = 2000000 -- by then every gateway has heard that they are recalled
local RECALL = 5000000

-- Microseconds until enough of a kind ("r" requests, "t" tokens) has left the window; -1 if the limit is below the amount
-- itself.
local function wait_for(kind, used, amount, limit)
  if amount > limit then return -1 end
  local excess, names = used + amount - limit, {}
  for at = oldest_slot(), slot do names[#names + 1] = kind .. int(at) end
  for i, one in ipairs(call('HMGET', window_key(tenant), unpack(names))) do
    excess = excess - tonumber(one or '0')
    if excess <= 0 then return (oldest_slot() + i - 1 + NUM_SLOTS) * SLOT - NOW end
  end
  return SLOT
end

local is_new = call('EXISTS', reservation_key(id)) == 0
local is_metered = limits[1] >= 0 or limits[2] >= 0 or limits[3] >= 0 or limits[4] >= 0
if is_new and is_metered then
  local generation, settled_at, renewed_at = unpack(call('HMGET', STATE, 'generation', 'settled_at', 'renewed_at'))
  local is_changed = known ~= '' and (known ~= generation or was_away(renewed_at, lease))
  if is_changed or tonumber(settled_at or '0') > NOW then return { -1, SLOT, -1, -1, -1, -1 } end
end

local shares = is_metered and read_shares(tenant, day, lease) or {}
local mine = shares[gateway]
if ARGV[14] and mine and tonumber(ARGV[14]) > mine.number then
  mine.number = tonumber(ARGV[14])
  for i = 1, 4 do mine.amounts[i] = math.min(mine.amounts[i], tonumber(ARGV[14 + i])) end
  write_share(tenant, gateway, mine)
end
local held = sum_shares(shares)
local window = read_window(tenant)
local used = read_used(tenant, window, day)
local amounts = { 1, tokens, 1, tokens }

local refusal, wait = 0, 0
local function refuse(limit, its_wait)
  if wait >= 0 and (its_wait < 0 or its_wait > wait or refusal == 0) then refusal, wait = limit, its_wait end
end

-- Requests are spaced as by GCRA: `tat` is when the allowance for requests at once is full again.
local interval = burst > 0 and limits[1] > 0 and math.ceil(60 * SLOT / limits[1]) or 0
local tat = math.max(window.tat, NOW) + interval
for i, limit in ipairs(limits) do
  if is_new and limit >= 0 and used[i] + amounts[i] > limit then
    if i == 1 then refuse(i, wait_for('r', window.r, 1, limit)) end
    if i == 2 then refuse(i, wait_for('t', window.t, tokens, limit)) end
    if i == 3 then refuse(i, limit == 0 and -1 or SLOT) end
    if i == 4 then refuse(i, -1) end
  end
end
if is_new and interval > 0 then
  local early = tat - NOW - math.max(burst - held[1], 1) * interval
  if early > 0 then refuse(1, early) end
elseif is_new and burst == 0 then
  refuse(1, -1)
end
for i, limit in ipairs(limits) do
  if is_new and refusal == 0 and limit >= 0 and used[i] + amounts[i] + held[i] > limit then
    refuse(10 + i, SHARES_GO_IN)
    call('ZADD', RECALLED, int(NOW + RECALL), tenant)
    call('PEXPIRE', RECALLED, int(RECALL / 1000))
  end
end

local function reply()
  local answer = { refusal, math.ceil(wait) }
  for i, limit in ipairs(limits) do answer[i + 2] = limit < 0 and -1 or math.max(limit - used[i], 0) end
  return answer
end

if refusal ~= 0 then return reply() end
call('ZREMRANGEBYSCORE', running_key(tenant), '-inf', int(NOW))
lease_slot(tenant, id, lease)
if not is_new then
  call('HSET', reservation_key(id), 'owner', gateway)
  call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS)
  return reply()
end
if #window.old > 0 then call('HDEL', window_key(tenant), unpack(window.old)) end
call('HSET', window_key(tenant), 'r', int(window.r), 't', int(window.t), 'from', int(oldest_slot()), 'tat', int(tat))
count_in_window(tenant, slot, 1, tokens)
call('HSET', day_key(tenant), 'day', int(day), 'tokens', int(used[4] + tokens))
call('PEXPIRE', day_key(tenant), DAY_KEPT_MS)
write_reservation(id, gateway, tokens, slot, day)
for i, amount in ipairs(amounts) do used[i] = used[i] + amount end
return reply()
