-- Keeps a job.
-- ARGV: 2 tenant, 3 job id, 4 request, 5 digest, 6 most jobs of the tenant
-- Returns 1; 0 if there is one with this id; -1 if the tenant has too many. Only 1 changes anything but what is forgotten.
local tenant, id = ARGV[2], ARGV[3]
if call('EXISTS', job_key(tenant, id)) == 1 then return 0 end
if call('ZCARD', list_key(tenant)) >= tonumber(ARGV[6]) then
  for _, listed in ipairs(call('ZRANGE', list_key(tenant), 0, 999)) do
    if call('EXISTS', job_key(tenant, listed)) == 0 then call('ZREM', list_key(tenant), listed) end
  end
  if call('ZCARD', list_key(tenant)) >= tonumber(ARGV[6]) then return -1 end
end
call('HSET', job_key(tenant, id), 'state', WAITING, 'request', ARGV[4], 'digest', ARGV[5], 'output_tokens', '0',
  'created_at', int(NOW), 'ended_at', '0', 'runs', '0')
call('ZADD', list_key(tenant), int(NOW), id)
call('ZADD', DUE, int(NOW), tenant .. '/' .. id)
return 1
