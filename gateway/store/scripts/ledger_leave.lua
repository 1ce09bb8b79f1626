-- Forgets a gateway that closes, unless it has left records open, which others then close.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways. ARGV: 1 gateway
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
return redis.call('SREM', KEYS[2], ARGV[1])
