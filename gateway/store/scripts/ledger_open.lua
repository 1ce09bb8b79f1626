-- Writes down that a request is accepted.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways. ARGV: 1 gateway, 2 record id, 3 record
redis.call('SADD', KEYS[2], ARGV[1])
return redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
