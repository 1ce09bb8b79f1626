-- Puts a cancel into the inbox of a request's owner.
-- ARGV: 2 request id
-- Returns 1; 0 if there is no such request or its owner is dead.
local owner = call('HGET', request_key(ARGV[2]), 'owner')
if not owner or not is_alive(owner) then return 0 end
send(owner, 'kind', 'cancel', 'request_id', ARGV[2])
return 1
