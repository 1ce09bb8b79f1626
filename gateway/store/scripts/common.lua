-- Loaded in front of every script of the queue: key names, the time, and small things that several verbs share.
-- KEYS: the pool's keys in the order of keys.py. ARGV[1]: the pool's prefix; the scripts' own arguments follow.
local MODELS, GATEWAYS, LEASES, SEQUENCE, ANNOUNCED, ANNOUNCEMENTS = unpack(KEYS)
local PREFIX = ARGV[1]
local FIRST_BAND, LAST_BAND = 1, 3

local call = redis.call

local function request_key(id) return PREFIX .. 'request:' .. id end
local function waiting_key(band, model) return PREFIX .. 'waiting:' .. band .. ':' .. model end
local function flows_key(band, model) return PREFIX .. 'flows:' .. band .. ':' .. model end
local function line_key(band, tenant, model) return PREFIX .. 'line:' .. band .. ':' .. tenant .. ':' .. model end
local function flow_key(band, tenant, model) return PREFIX .. 'flow:' .. band .. ':' .. tenant .. ':' .. model end
local function service_key(model) return PREFIX .. 'service:' .. model end
local function owned_key(gateway) return PREFIX .. 'owned:' .. gateway end
local function reached_key(gateway) return PREFIX .. 'reached:' .. gateway end
local function inbox_key(gateway) return PREFIX .. 'inbox:' .. gateway end
local function worker_key(worker) return PREFIX .. 'worker:' .. worker end
local function serving_key(model) return PREFIX .. 'serving:' .. model end
local function claims_key(worker) return PREFIX .. 'claims:' .. worker end
local function reservation_key(id) return PREFIX .. 'reservation:' .. id end -- of the limiter

local NOW = read_clock()

-- Integers as text: tostring() would round them to 14 digits. Not for negative zero, which a difference never is.
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

-- Forgets a claim that is not yet contained in its worker's numbers.
local function drop_claim(id, worker)
  call('HDEL', claims_key(worker), id)
  call('ZREM', LEASES, id)
end
