-- Adds a request at the end of the fresh or the resumed work of its flow.
-- ARGV: 2 request id, 3 owner, 4 model, 5 band, 6 tenant, 7 weight of the tenant, 8 input tokens, 9 tokens needed,
--       10 max length of the band, 11 max waiting requests of the tenant, 12 microseconds that the owner is taken to live if
--       it has no heartbeat yet, 13 attempt of its last claim, 14 is it resumed, 15 JSON of cached blocks, or empty,
--       16 does it need a reservation of its tenant's limits
-- Returns its arrival number; -1 if the id is live already; -2 if the band is full, -3 if the tenant's part of the queue is;
-- -4 if it has no reservation. A refusal writes nothing.
local id, owner, model, band, tenant = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local max_length, max_of_tenant, owner_ttl = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])

if ARGV[16] == '1' and call('EXISTS', reservation_key(id)) == 0 then return -4 end
if call('EXISTS', request_key(id)) == 1 then return -1 end
local length, of_tenant = 0, 0
for _, listed in ipairs(call('SMEMBERS', MODELS)) do
  length = length + call('ZCARD', waiting_key(band, listed))
  for b = FIRST_BAND, LAST_BAND do of_tenant = of_tenant + call('ZCARD', line_key(b, tenant, listed)) end
end
if length >= max_length then return -2 end
if of_tenant >= max_of_tenant then return -3 end

local arrival = call('INCR', SEQUENCE)
local rank = ARGV[14] == '1' and '-1' or '0'
if not is_alive(owner) then call('ZADD', GATEWAYS, int(NOW + owner_ttl), owner) end
call('SADD', owned_key(owner), id)
call('HSET', request_key(id), 'owner', owner, 'model', model, 'band', band, 'tenant', tenant, 'input_tokens', ARGV[8],
  'tokens_needed', ARGV[9], 'cached', ARGV[15], 'arrival', int(arrival), 'rank', rank, 'turn', int(arrival), 'waiting_since', int(NOW),
  'attempt', ARGV[13], 'worker', '', 'epoch', '', 'overtaken', '0', 'charged', '0', 'charged_tokens', '0')
call('HSET', flow_key(band, tenant, model), 'weight', ARGV[7])
list(id, band, model, tenant, arrival, rank, int(arrival), true)
return arrival
