-- Closes, a bounded number per run, the open records of gateways that are dead, and settles what these had reserved by what
-- was noted last. A reservation that another gateway has taken over with its request stays.
-- Where each record went is noted: a gateway that was only thought dead says later how it really ended.
-- KEYS: the pool's, then 7 stream, 8 owners. ARGV: 1 the pool's prefix, 2 length of the stream; then the names of a
-- record's values, those of outcome and reason last
-- Returns how many were closed.
local MOST = 500
local KEPT_MS = 3600000

-- Names and values of an open record, as the stream has them.
local function read_record(packed)
  local values, parts, fields = cjson.decode(packed), {}, {}
  values[#values + 1] = 'lost'
  values[#values + 1] = 'GATEWAY_LOST'
  for i, value in ipairs(values) do
    local name = ARGV[i + 2]
    parts[#parts + 1], parts[#parts + 2] = name, value
    fields[name] = value
  end
  return parts, fields
end

local function settle_lost(owner, fields)
  local id = fields.request_id
  if call('HGET', reservation_key(id), 'owner') ~= owner then return end
  local was_taken = tonumber(fields.num_attempts) > 0
  settle(fields.tenant, id, was_taken and tonumber(fields.prompt_tokens) + tonumber(fields.generated_tokens) or 0)
end

local num_closed = 0
for _, owner in ipairs(call('SMEMBERS', KEYS[8])) do
  if not is_alive(owner) then
    local open, reaped = PREFIX .. 'ledger_open:' .. owner, PREFIX .. 'ledger_reaped:' .. owner
    for _, id in ipairs(call('HKEYS', open)) do
      if num_closed >= MOST then return num_closed end
      local parts, fields = read_record(call('HGET', open, id))
      settle_lost(owner, fields)
      call('HDEL', open, id)
      local earlier = call('HGET', reaped, id) -- it was open again: see ledger_close
      if earlier then call('XDEL', KEYS[7], earlier) end
      call('HSET', reaped, id, call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[2], '*', unpack(parts)))
      call('PEXPIRE', reaped, KEPT_MS)
      num_closed = num_closed + 1
    end
    call('SREM', KEYS[8], owner)
  end
end
return num_closed
