-- Reads a job.
-- ARGV: 2 tenant, 3 job id; then names of fields
-- Returns the fields' values; nil if there is no such job.
if call('EXISTS', job_key(ARGV[2], ARGV[3])) == 0 then return nil end
return call('HMGET', job_key(ARGV[2], ARGV[3]), unpack(ARGV, 4))
