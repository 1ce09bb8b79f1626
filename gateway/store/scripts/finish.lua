-- Removes every trace of a request, waiting or claimed.
-- ARGV: 2 request id, 3 owner, 4 arrival number that it must have, or empty for any
-- Returns 1; 0, and changes nothing, if the owner has no such request.
local owner, arrival = unpack(call('HMGET', request_key(ARGV[2]), 'owner', 'arrival'))
if owner ~= ARGV[3] or (ARGV[4] ~= '' and arrival ~= ARGV[4]) then return 0 end
remove_request(ARGV[2])
return 1
