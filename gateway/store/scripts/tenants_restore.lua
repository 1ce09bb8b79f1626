-- Writes all edits again that the store has lost. Nothing if it knows any version.
-- KEYS: 1 edits by tenant, 2 their version. ARGV: 1 version; then pairs of tenant and edit
-- Returns 1 if they were written.
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
