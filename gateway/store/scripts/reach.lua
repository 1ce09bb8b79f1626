-- Says which workers a gateway can submit to.
-- ARGV: 2 gateway, 3 microseconds that this is good for; then the ids of the workers
-- Returns 1.
local key = reached_key(ARGV[2])
call('DEL', key)
call('SADD', key, '', unpack(ARGV, 4))
call('PEXPIRE', key, int(math.ceil(tonumber(ARGV[3]) / 1000)))
return 1
