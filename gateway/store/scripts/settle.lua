-- Replaces a reservation by what was used, and gives its concurrency slot back.
-- ARGV: 2 tenant, 3 request id, 4 tokens used
-- Returns 1; 0 if there is no such reservation, after freeing the slot all the same.
local tenant, id = ARGV[2], ARGV[3]
local tokens, slot, day = unpack(call('HMGET', reservation_key(id), 'tokens', 'slot', 'day'))
call('ZREM', running_key(tenant), id)
if not tokens then return 0 end
call('DEL', reservation_key(id))
local unused = tonumber(tokens) - tonumber(ARGV[4])
-- What has left the window or belongs to another day is not there to be changed.
if call('HEXISTS', window_key(tenant), 't' .. slot) == 1 then
  call('HINCRBY', window_key(tenant), 't' .. slot, int(0 - unused))
end
if call('HGET', day_key(tenant), 'day') == day then call('HINCRBY', day_key(tenant), 'tokens', int(0 - unused)) end
return 1
