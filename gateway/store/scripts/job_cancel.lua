-- Ends a job that has not ended. ARGV: 2 tenant, 3 job id, 4 milliseconds to keep it
local tenant, id = ARGV[2], ARGV[3]
local state = call('HGET', job_key(tenant, id), 'state')
if state ~= WAITING and state ~= RUNNING then return 0 end
end_job(tenant, id, ARGV[4], 'state', CANCELLED)
return 1
