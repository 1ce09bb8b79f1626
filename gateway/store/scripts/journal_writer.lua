-- Reads who writes a journal.
-- KEYS: 1 journal, 2 passages. ARGV: 1 milliseconds to keep it
-- Returns the number of the writer; nil if there is no journal.
return redis.call('HGET', KEYS[1], 'writer')
