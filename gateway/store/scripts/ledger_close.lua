-- Moves records from the open ones into the stream.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways
-- ARGV: 1 length of the stream, 2 parts of a record; then the parts of each: names and values, the record id's first
-- Returns for each 1, or 0 if it was not open, and so is not written.
local size = tonumber(ARGV[2])
local closed = {}
for start = 3, #ARGV, size do
  local was_open = redis.call('HDEL', KEYS[3], ARGV[start + 1])
  if was_open == 1 then
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, start, start + size - 1))
  end
  closed[#closed + 1] = was_open
end
return closed
