-- Makes the caller the only writer of a journal.
-- KEYS: 1 journal, 2 passages. ARGV: 1 milliseconds to keep it
-- Returns the number of the new writer, request, digest and all passages in order; nil if there is no journal.
if redis.call('EXISTS', KEYS[1]) == 0 then return nil end
local writer = redis.call('HINCRBY', KEYS[1], 'writer', 1)
redis.call('HSET', KEYS[1], 'written', '0')
local request, digest = unpack(redis.call('HMGET', KEYS[1], 'request', 'digest'))
local passages = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+')) do passages[#passages + 1] = entry[2][2] end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return {writer, request, digest, passages}
