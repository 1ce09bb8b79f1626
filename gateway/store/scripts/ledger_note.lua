-- Renews open records; one that is not open (any more) stays so.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways. ARGV: pairs of record id and record
for i = 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1 then redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
return #ARGV / 2
