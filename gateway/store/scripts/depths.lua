-- Waiting requests by band.
-- Returns for each band, highest first: number waiting, microseconds that its longest-waiting request has waited.
local depths = {}
local models = call('SMEMBERS', MODELS)
for band = FIRST_BAND, LAST_BAND do
  local length, wait = 0, 0
  for _, model in ipairs(models) do
    length = length + call('ZCARD', waiting_key(band, model))
    local head = call('ZRANGE', waiting_key(band, model), 0, 0)[1]
    if head then wait = math.max(wait, NOW - tonumber(call('HGET', request_key(head), 'waiting_since'))) end
  end
  depths[#depths + 1] = length
  depths[#depths + 1] = wait
end
return depths
