-- Adds a request at the end of its band.
-- ARGV: 2 request id, 3 owner, 4 model, 5 band, 6 input tokens, 7 tokens needed, 8 max length of the band,
--       9 microseconds that the owner is taken to live if it has no heartbeat yet
-- Returns its arrival number; -1 if the id is live already; -2 if the band is full. A refusal writes nothing.
local id, owner, model, band = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local max_length, owner_ttl = tonumber(ARGV[8]), tonumber(ARGV[9])

if call('EXISTS', request_key(id)) == 1 then return -1 end
local length = 0
for _, listed in ipairs(call('SMEMBERS', MODELS)) do
  length = length + call('ZCARD', waiting_key(band, listed))
end
if length >= max_length then return -2 end

local arrival = call('INCR', SEQUENCE)
if not is_alive(owner) then call('ZADD', GATEWAYS, int(NOW + owner_ttl), owner) end
call('SADD', owned_key(owner), id)
call('HSET', request_key(id), 'owner', owner, 'model', model, 'band', band, 'input_tokens', ARGV[6],
  'tokens_needed', ARGV[7], 'arrival', int(arrival), 'resumed', '0', 'waiting_since', int(NOW), 'attempt', '0',
  'worker', '', 'epoch', '', 'overtaken', '0')
list(id, band, model, arrival, false)
return arrival
