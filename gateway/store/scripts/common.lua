-- Loaded in front of every script: key names, the clock, and the changes that several verbs share.
-- KEYS: the pool's keys in the order of keys.py. ARGV[1]: the pool's prefix; the scripts' own arguments follow.
local MODELS, GATEWAYS, LEASES, SEQUENCE, ANNOUNCED, ANNOUNCEMENTS = unpack(KEYS)
local PREFIX = ARGV[1]
local FIRST_BAND, LAST_BAND = 1, 3
local RESUMED_OFFSET = 4503599627370496 -- 2^52: places with and without it are exact in a double, and never mix

local call = redis.call

local function request_key(id) return PREFIX .. 'request:' .. id end
local function waiting_key(band, model) return PREFIX .. 'waiting:' .. band .. ':' .. model end
local function owned_key(gateway) return PREFIX .. 'owned:' .. gateway end
local function inbox_key(gateway) return PREFIX .. 'inbox:' .. gateway end
local function worker_key(worker) return PREFIX .. 'worker:' .. worker end
local function serving_key(model) return PREFIX .. 'serving:' .. model end
local function claims_key(worker) return PREFIX .. 'claims:' .. worker end

local function read_clock()
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local NOW = read_clock()

-- Integers as text: tostring() would round them to 14 digits.
local function int(number) return string.format('%.0f', number) end

-- Compares 64-bit decimal strings without leading zeros: -1, 0 or 1.
local function compare(a, b)
  if a == b then return 0 end
  if #a ~= #b then return #a < #b and -1 or 1 end
  return a < b and -1 or 1
end

-- Is the gateway's heartbeat in time?
local function is_alive(gateway)
  local until_time = call('ZSCORE', GATEWAYS, gateway)
  return until_time and tonumber(until_time) > NOW
end

-- Puts a message into a gateway's inbox, which lives as long as the gateway's heartbeat. Nothing for a dead gateway.
local function send(gateway, ...)
  local until_time = tonumber(call('ZSCORE', GATEWAYS, gateway) or '0')
  if until_time <= NOW then return end
  call('XADD', inbox_key(gateway), '*', ...)
  call('PEXPIREAT', inbox_key(gateway), int(math.ceil(until_time / 1000)))
end

-- Takes a request off its waiting list.
local function unlist(id, band, model)
  if call('ZREM', waiting_key(band, model), id) == 0 then return end
  for b = FIRST_BAND, LAST_BAND do
    if call('EXISTS', waiting_key(b, model)) == 1 then return end
  end
  call('SREM', MODELS, model)
end

-- Puts a request onto its waiting list, at its place.
local function list(id, band, model, arrival, resumed)
  local place = tonumber(arrival)
  if resumed then place = place - RESUMED_OFFSET end
  call('ZADD', waiting_key(band, model), int(place), id)
  call('SADD', MODELS, model)
end

-- Forgets a claim that is not yet contained in its worker's numbers.
local function drop_claim(id, worker)
  call('HDEL', claims_key(worker), id)
  call('ZREM', LEASES, id)
end

-- Removes every key and field of a request, in whatever state it is.
local function remove_request(id)
  local owner, band, model, worker = unpack(call('HMGET', request_key(id), 'owner', 'band', 'model', 'worker'))
  if not owner then return end
  if worker == '' then unlist(id, band, model) else drop_claim(id, worker) end
  call('SREM', owned_key(owner), id)
  call('DEL', request_key(id))
end

-- Undoes the present claim of a request: it waits again. `resumed` moves it ahead of fresh work of its band, for good.
local function undo_claim(id, resumed)
  local band, model, worker, arrival, was_resumed =
    unpack(call('HMGET', request_key(id), 'band', 'model', 'worker', 'arrival', 'resumed'))
  drop_claim(id, worker)
  call('HSET', request_key(id), 'worker', '', 'epoch', '')
  if resumed then call('HSET', request_key(id), 'resumed', '1', 'waiting_since', int(NOW)) end
  list(id, band, model, arrival, resumed or was_resumed == '1')
end
