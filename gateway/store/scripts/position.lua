-- Where a waiting request stands.
-- ARGV: 2 request id
-- Returns {requests ahead in its flow, flows of its band served less, requests of its model in higher bands, times that it
-- was overtaken}; nothing if it does not wait.
local id = ARGV[2]
local band, model, tenant, overtaken = unpack(call('HMGET', request_key(id), 'band', 'model', 'tenant', 'overtaken'))
local place = band and call('ZRANK', line_key(band, tenant, model), id)
if not place then return {} end
local above = 0
for higher = FIRST_BAND, tonumber(band) - 1 do above = above + call('ZCARD', waiting_key(higher, model)) end
return { place, call('ZRANK', flows_key(band, model), tenant) or 0, above, tonumber(overtaken) }
