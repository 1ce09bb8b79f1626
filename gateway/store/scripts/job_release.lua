-- Puts a job back. ARGV: 2 tenant, 3 job id, 4 run, 5 microseconds until it is due again
local tenant, id = ARGV[2], ARGV[3]
if not is_running(tenant, id, ARGV[4]) then return 0 end
call('HSET', job_key(tenant, id), 'state', WAITING)
call('ZADD', DUE, int(NOW + tonumber(ARGV[5])), tenant .. '/' .. id)
return 1
