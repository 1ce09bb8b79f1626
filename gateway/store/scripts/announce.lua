-- Makes a worker known for a while.
-- ARGV: 2 worker, 3 epoch, 4 microseconds, 5 JSON of the announcement, with its epoch as a string
-- Returns 1; 0, and changes nothing, if a newer epoch is known.
local until_time = call('ZSCORE', ANNOUNCED, ARGV[2])
if until_time and tonumber(until_time) > NOW then
  local known = cjson.decode(call('HGET', ANNOUNCEMENTS, ARGV[2]))
  if compare(ARGV[3], known.epoch) < 0 then return 0 end
end
call('ZADD', ANNOUNCED, int(NOW + tonumber(ARGV[4])), ARGV[2])
call('HSET', ANNOUNCEMENTS, ARGV[2], ARGV[5])
return 1
