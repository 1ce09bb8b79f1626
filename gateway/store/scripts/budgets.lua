-- What is left of tenants' limits.
-- ARGV: for each tenant: tenant, the limits, -1 for none: requests per minute, tokens per minute, concurrent requests, tokens
--       per day; microseconds that its day is ahead of UTC
-- Returns what is left of each limit, or -1 for none, four numbers for each tenant.
local left = {}
for i = 2, #ARGV, 6 do
  local tenant, day = ARGV[i], math.floor((NOW + tonumber(ARGV[i + 5])) / DAY)
  local used = read_used(tenant, read_window(tenant), day)
  for kind = 1, 4 do
    local limit = tonumber(ARGV[i + kind])
    left[#left + 1] = limit < 0 and -1 or math.max(limit - used[kind], 0)
  end
end
return left
