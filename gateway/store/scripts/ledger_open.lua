-- Writes down that requests are accepted.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways. ARGV: 1 gateway; then pairs of record id and record
redis.call('SADD', KEYS[2], ARGV[1])
return redis.call('HSET', KEYS[3], unpack(ARGV, 2))
