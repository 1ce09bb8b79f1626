-- Reads a tenant's jobs, newest first, and drops those that are forgotten from its list.
-- ARGV: 2 tenant, 3 how many, 4 creation time that they come before, or empty; then names of fields
-- Returns where to go on, or an empty string, and for each its id and the fields' values. Jobs of one microsecond stay together.
local tenant, limit = ARGV[2], tonumber(ARGV[3])
local most = ARGV[4] == '' and '+inf' or '(' .. ARGV[4]
local jobs, last = {}, ''
local listed = call('ZRANGE', list_key(tenant), most, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 10 * limit, 'WITHSCORES')
for i = 1, #listed, 2 do
  if #jobs >= limit and listed[i + 1] ~= last then return {last, jobs} end
  last = int(tonumber(listed[i + 1]))
  listed[i + 1] = last
  if call('EXISTS', job_key(tenant, listed[i])) == 0 then
    call('ZREM', list_key(tenant), listed[i])
  else
    jobs[#jobs + 1] = {listed[i], call('HMGET', job_key(tenant, listed[i]), unpack(ARGV, 5))}
  end
end
return {#listed < 20 * limit and '' or last, jobs}
