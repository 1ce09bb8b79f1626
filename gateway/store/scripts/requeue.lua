-- Undoes a claim: the request waits again.
-- ARGV: 2 request id, 3 owner, 4 attempt, 5 "first", "same" or "last", 6 input tokens, 7 tokens needed, 8 JSON of cached
--       blocks, or empty
-- Returns 1; 0, and changes nothing, if that attempt is not the owner's present claim.
local id = ARGV[2]
local owner, attempt, worker = unpack(call('HMGET', request_key(id), 'owner', 'attempt', 'worker'))
if owner ~= ARGV[3] or attempt ~= ARGV[4] or worker == '' then return 0 end
undo_claim(id, ARGV[5])
call('HSET', request_key(id), 'input_tokens', ARGV[6], 'tokens_needed', ARGV[7], 'cached', ARGV[8])
return 1
