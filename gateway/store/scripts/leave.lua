-- Removes a gateway that closes: its heartbeat, its inbox, and whatever it still owns.
-- ARGV: 2 gateway
local me = ARGV[2]
for _, id in ipairs(call('SMEMBERS', owned_key(me))) do remove_request(id) end
call('DEL', inbox_key(me), reached_key(me))
call('ZREM', GATEWAYS, me)
return 1
