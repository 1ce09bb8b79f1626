-- Takes jobs that are due: that wait, or whose lease has passed.
-- ARGV: 2 how many, 3 microseconds of the lease
-- Returns tenant, id, number of the run and request of each.
local runs = {}
for _, name in ipairs(call('ZRANGE', DUE, '-inf', int(NOW), 'BYSCORE', 'LIMIT', 0, ARGV[2])) do
  local tenant, id = string.match(name, '^([^/]*)/(.*)$')
  call('ZADD', DUE, int(NOW + tonumber(ARGV[3])), name)
  local number = call('HINCRBY', job_key(tenant, id), 'runs', 1)
  call('HSET', job_key(tenant, id), 'state', RUNNING)
  runs[#runs + 1] = {tenant, id, number, call('HGET', job_key(tenant, id), 'request')}
end
return runs
