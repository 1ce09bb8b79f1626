-- Loaded before all others: the one source of time, in microseconds.
local function read_clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
