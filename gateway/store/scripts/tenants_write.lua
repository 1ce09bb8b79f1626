-- Sets what an operator says of a tenant, or removes it.
-- KEYS: 1 edits by tenant, 2 their version. ARGV: 1 tenant, 2 edit, empty to remove it
-- Returns the new version.
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
return redis.call('INCR', KEYS[2])
