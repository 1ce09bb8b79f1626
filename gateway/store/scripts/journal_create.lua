-- Begins the journal of a request.
-- KEYS: 1 journal, 2 passages. ARGV: 1 milliseconds to keep it, 2 request, 3 digest
-- Returns the number of its writer; 0, and changes nothing, if there is one.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'request', ARGV[2], 'digest', ARGV[3], 'writer', '1', 'written', '0')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
