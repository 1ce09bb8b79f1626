-- Notes how requests ended with an error, and forgets that of those that ended well later.
-- KEYS: 1 notes by request, 2 their times. ARGV: 1 notes that are kept; then request ids and notes, empty to forget one
local now = read_clock()
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('ZADD', KEYS[2], now, ARGV[i])
  end
end
local excess = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[1])
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], excess)
  for i = 1, #oldest, 2 do redis.call('HDEL', KEYS[1], oldest[i]) end
end
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], 86400) end
return excess
