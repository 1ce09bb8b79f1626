-- Extends the leases of a gateway's running requests, also of those that have expired meanwhile, and finds out whether the
-- store may have missed something: then it grants nothing for a while, in which every gateway tells what it knows.
-- ARGV: 2 microseconds of the leases, 3 generation of the store's content that the gateway knows, or empty, 4 one that it
--       would choose; then for each request: tenant, request id
-- Returns {generation, ids that have no reservation, tenants whose shares are recalled}. Such an id has been settled
-- meanwhile, or the store has lost it.
local lease, known = tonumber(ARGV[2]), ARGV[3]
local SETTLING = 6000000 -- a gateway that says nothing for so long is taken for dead
local generation, renewed_at = unpack(call('HMGET', STATE, 'generation', 'renewed_at'))
if known ~= '' and (generation ~= known or was_away(renewed_at, lease)) then
  call('HSET', STATE, 'settled_at', int(NOW + SETTLING))
end
generation = generation or ARGV[4]
call('HSET', STATE, 'generation', generation, 'renewed_at', int(NOW))
call('PEXPIRE', STATE, RESERVATION_KEPT_MS)

local unknown = {}
for i = 5, #ARGV, 2 do
  local tenant, id = ARGV[i], ARGV[i + 1]
  if call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS) == 1 then
    lease_slot(tenant, id, lease)
  else
    unknown[#unknown + 1] = id
  end
end
return { generation, unknown, call('ZRANGEBYSCORE', RECALLED, int(NOW), '+inf') }
