-- Keeps a run and shows its progress.
-- ARGV: 2 tenant, 3 job id, 4 run, 5 microseconds of the lease, 6 output tokens
-- Returns 1; 0, and changes nothing, if the run is over.
local tenant, id = ARGV[2], ARGV[3]
if not is_running(tenant, id, ARGV[4]) then return 0 end
call('HSET', job_key(tenant, id), 'output_tokens', ARGV[6])
call('ZADD', DUE, int(NOW + tonumber(ARGV[5])), tenant .. '/' .. id)
return 1
