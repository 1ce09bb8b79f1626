-- Waiting requests by flow, in the order of their turns inside a band.
-- Returns for each: band, model, tenant, number waiting, microseconds that the longest-waiting of its first hundred has
-- waited, counter in hundredths of weighted tokens at weight 1, weight.
local MOST_READ = 100 -- of a line
local depths = {}
local models = call('SMEMBERS', MODELS)
table.sort(models)
for _, model in ipairs(models) do
  for band = FIRST_BAND, LAST_BAND do
    local flows = call('ZRANGE', flows_key(band, model), 0, -1, 'WITHSCORES')
    for i = 1, #flows, 2 do
      local tenant, wait = flows[i], 0
      local line = line_key(band, tenant, model)
      for _, id in ipairs(call('ZRANGE', line, 0, MOST_READ - 1)) do
        wait = math.max(wait, NOW - tonumber(call('HGET', request_key(id), 'waiting_since')))
      end
      local weight = call('HGET', flow_key(band, tenant, model), 'weight') or '1'
      depths[#depths + 1] = { band, model, tenant, call('ZCARD', line), wait, flows[i + 1], weight }
    end
  end
end
return depths
