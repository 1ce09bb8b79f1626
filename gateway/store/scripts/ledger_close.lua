-- Moves a record from the open ones into the stream.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways
-- ARGV: 1 length of the stream, 2 record id; then names and values of the finished record
-- Returns 1; 0, and writes nothing, if the record is not open.
if redis.call('HDEL', KEYS[3], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, 3))
return 1
