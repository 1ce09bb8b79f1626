-- What operators have set for tenants, if it has changed.
-- KEYS: 1 edits by tenant, 2 their version. ARGV: 1 the version that is known
-- Returns {version, nothing if it is the known one, else {1, tenants and edits}}. Without any edit yet the version is 0.
local version = tonumber(redis.call('GET', KEYS[2]) or '0')
if version == tonumber(ARGV[1]) then return { version, {} } end
return { version, { 1, redis.call('HGETALL', KEYS[1]) } }
