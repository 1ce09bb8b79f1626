-- Removes a journal.
-- KEYS: 1 journal, 2 passages. ARGV: 1 milliseconds to keep it, 2 writer
-- Returns 1; 0, and changes nothing, if another writer has taken over.
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
