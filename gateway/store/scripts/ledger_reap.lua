-- Closes, a bounded number per run, the open records of gateways that are dead.
-- Where each went is noted: a gateway that was only thought dead says later how it really ended.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways, 5 reaped records of this gateway
-- ARGV: 1 the pool's prefix, 2 length of the stream
-- Returns how many were closed.
local MOST = 500
local KEPT_MS = 3600000
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local num_closed = 0
for _, owner in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local until_time = tonumber(redis.call('ZSCORE', KEYS[4], owner) or '0')
  if until_time <= now then
    local open, reaped = ARGV[1] .. 'ledger_open:' .. owner, ARGV[1] .. 'ledger_reaped:' .. owner
    for _, id in ipairs(redis.call('HKEYS', open)) do
      if num_closed >= MOST then return num_closed end
      local record = cjson.decode(redis.call('HGET', open, id))
      for _, part in ipairs({'outcome', 'lost', 'reason', 'GATEWAY_LOST'}) do record[#record + 1] = part end
      redis.call('HDEL', open, id)
      redis.call('HSET', reaped, id, redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(record)))
      redis.call('PEXPIRE', reaped, KEPT_MS)
      num_closed = num_closed + 1
    end
    redis.call('SREM', KEYS[2], owner)
  end
end
return num_closed
