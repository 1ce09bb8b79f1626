-- Ends a job.
-- ARGV: 2 tenant, 3 job id, 4 run, 5 milliseconds to keep it, 6 state, 7 output tokens, 8 result, 9 reason, 10 message
-- Returns 1; 0, and changes nothing, if the run is over.
local tenant, id = ARGV[2], ARGV[3]
if not is_running(tenant, id, ARGV[4]) then return 0 end
end_job(tenant, id, ARGV[5], 'state', ARGV[6], 'output_tokens', ARGV[7], 'result', ARGV[8], 'reason', ARGV[9],
  'message', ARGV[10])
return 1
