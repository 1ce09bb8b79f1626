-- Writes what follows in an answer.
-- KEYS: 1 journal, 2 passages. ARGV: 1 milliseconds to keep it, 2 writer, 3 number of the passage, 4 passage
-- Returns 1; 0, and changes nothing, if another writer has taken over or the journal is forgotten.
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[2] then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'written')) >= tonumber(ARGV[3]) then return 1 end
redis.call('HSET', KEYS[1], 'written', ARGV[3])
redis.call('XADD', KEYS[2], '*', 'passage', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
