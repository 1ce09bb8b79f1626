-- How a request ended with an error.
-- KEYS: 1 notes by request, 2 their times. ARGV: 1 request id
-- Returns the note and its age in microseconds, or nil.
local noted_at = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not noted_at then return nil end
return {redis.call('HGET', KEYS[1], ARGV[1]), read_clock() - tonumber(noted_at)}
