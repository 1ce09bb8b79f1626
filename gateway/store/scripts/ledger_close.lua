-- Moves a record from the open ones into the stream. One that was reaped meanwhile is replaced, one that the store has lost
-- is written all the same.
-- KEYS: 1 stream, 2 owners, 3 open records of this gateway, 4 gateways, 5 reaped records of this gateway
-- ARGV: 1 length of the stream; then the parts of the record: names and values, the record id's first
-- Returns 1, or 0 if it was written before, by a call whose reply did not arrive.
local LATEST = 2000 -- such a call was made a few seconds ago
local id = ARGV[3]

local function is_written()
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', LATEST)) do
    if entry[2][2] == id then return true end
  end
  return false
end

-- One that was reaped may be open again: its opening has been repeated, as the first one's answer was lost.
local function is_due()
  local was_open = redis.call('HDEL', KEYS[3], id) == 1
  local reaped_as = redis.call('HGET', KEYS[5], id)
  if not reaped_as then return was_open or not is_written() end
  redis.call('XDEL', KEYS[1], reaped_as)
  redis.call('HDEL', KEYS[5], id)
  return true
end

if not is_due() then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, 2))
return 1
