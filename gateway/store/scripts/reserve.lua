-- Takes a request's whole cost from every limit of its tenant, or nothing.
-- ARGV: 2 tenant, 3 request id, 4 tokens that it may use, then the limits, -1 for none: 5 requests per minute, 6 tokens per
--       minute, 7 concurrent requests, 8 tokens per day; 9 microseconds that the tenant's day is ahead of UTC, 10 microseconds
--       of the lease of its concurrency slot
-- Returns {what refused it, microseconds until a retry may succeed or -1 for never, what is left of each limit or -1}; what
-- refused it is 0 for nothing, else the position of the limit: 1 requests, 2 tokens, 3 concurrency, 4 the day. A refusal
-- writes nothing. An id that has a reservation is not charged again.
local tenant, id, tokens = ARGV[2], ARGV[3], tonumber(ARGV[4])
local limits = { tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]) }
local slot, day = math.floor(NOW / SLOT), math.floor((NOW + tonumber(ARGV[9])) / DAY)
local lease = tonumber(ARGV[10])

-- Slots of a kind ("r" requests, "t" tokens) in the window, oldest first, their sum, and the fields that are too old.
local function read_window()
  local window = { r = { sum = 0 }, t = { sum = 0 }, old = {} }
  local fields = call('HGETALL', window_key(tenant))
  for i = 1, #fields, 2 do
    local kind, at, amount = string.sub(fields[i], 1, 1), tonumber(string.sub(fields[i], 2)), tonumber(fields[i + 1])
    if at > slot - NUM_SLOTS then
      table.insert(window[kind], { at = at, amount = amount })
      window[kind].sum = window[kind].sum + amount
    else
      table.insert(window.old, fields[i])
    end
  end
  return window
end

-- Microseconds until enough has left the window; -1 if the limit is below the amount itself.
local function wait_for(used, amount, limit)
  if amount > limit then return -1 end
  table.sort(used, function(a, b) return a.at < b.at end)
  local excess = used.sum + amount - limit
  for _, one in ipairs(used) do
    excess = excess - one.amount
    if excess <= 0 then return (one.at + NUM_SLOTS) * SLOT - NOW end
  end
end

local window = read_window()
local is_new = call('EXISTS', reservation_key(id)) == 0
local its_day, spent = unpack(call('HMGET', day_key(tenant), 'day', 'tokens'))
local used = { window.r.sum, window.t.sum, call('ZCOUNT', running_key(tenant), '(' .. int(NOW), '+inf'),
  its_day == int(day) and tonumber(spent) or 0 }
local amounts = { 1, tokens, 1, tokens }

local refusal, wait = 0, 0
local function refuse(limit, its_wait)
  if wait >= 0 and (its_wait < 0 or its_wait > wait or refusal == 0) then refusal, wait = limit, its_wait end
end
for i, limit in ipairs(limits) do
  if is_new and limit >= 0 and used[i] + amounts[i] > limit then
    if i == 1 then refuse(i, wait_for(window.r, 1, limit)) end
    if i == 2 then refuse(i, wait_for(window.t, tokens, limit)) end
    if i == 3 then refuse(i, limit == 0 and -1 or SLOT) end
    if i == 4 then refuse(i, -1) end
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
  call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS)
  return reply()
end
for _, field in ipairs(window.old) do call('HDEL', window_key(tenant), field) end
call('HINCRBY', window_key(tenant), 'r' .. int(slot), 1)
call('HINCRBY', window_key(tenant), 't' .. int(slot), int(tokens))
call('PEXPIRE', window_key(tenant), WINDOW_KEPT_MS)
call('HSET', day_key(tenant), 'day', int(day), 'tokens', int(used[4] + tokens))
call('PEXPIRE', day_key(tenant), DAY_KEPT_MS)
call('HSET', reservation_key(id), 'tokens', int(tokens), 'slot', int(slot), 'day', int(day))
call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS)
for i, amount in ipairs(amounts) do used[i] = used[i] + amount end
return reply()
