-- Extends the leases of a gateway's running requests, also of those that have expired meanwhile.
-- ARGV: 2 microseconds of the leases; then for each request: tenant, request id
-- Returns the ids that have no reservation: they have been settled meanwhile, or the store has lost them.
local unknown = {}
for i = 3, #ARGV, 2 do
  local tenant, id = ARGV[i], ARGV[i + 1]
  if call('PEXPIRE', reservation_key(id), RESERVATION_KEPT_MS) == 1 then
    lease_slot(tenant, id, tonumber(ARGV[2]))
  else
    unknown[#unknown + 1] = id
  end
end
return unknown
