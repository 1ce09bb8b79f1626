-- Says that a gateway lives, and reaps, a bounded amount per run, what dead gateways and expired claims left.
-- ARGV: 2 gateway, 3 microseconds that it lives for; then the ids of its requests
-- Returns those of the given ids that the queue does not know as the gateway's.
local me = ARGV[2]
local until_time = NOW + tonumber(ARGV[3])
local MAX_GATEWAYS, MAX_REQUESTS, MAX_LEASES = 8, 500, 500

local function reap_gateway(gateway)
  for _, id in ipairs(call('SRANDMEMBER', owned_key(gateway), MAX_REQUESTS)) do remove_request(id) end
  if call('EXISTS', owned_key(gateway)) == 1 then return end
  call('DEL', inbox_key(gateway), reached_key(gateway))
  call('ZREM', GATEWAYS, gateway)
end

call('ZADD', GATEWAYS, int(until_time), me)
call('PEXPIREAT', inbox_key(me), int(math.ceil(until_time / 1000)))

for _, gateway in ipairs(call('ZRANGEBYSCORE', GATEWAYS, '-inf', int(NOW), 'LIMIT', 0, MAX_GATEWAYS)) do
  reap_gateway(gateway)
end
for _, id in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', int(NOW), 'LIMIT', 0, MAX_LEASES)) do
  undo_claim(id, 'same')
end
for _, worker in ipairs(call('ZRANGEBYSCORE', ANNOUNCED, '-inf', int(NOW))) do
  call('ZREM', ANNOUNCED, worker)
  call('HDEL', ANNOUNCEMENTS, worker)
end

local unknown = {}
for i = 4, #ARGV do
  if call('SISMEMBER', owned_key(me), ARGV[i]) == 0 then unknown[#unknown + 1] = ARGV[i] end
end
return unknown
