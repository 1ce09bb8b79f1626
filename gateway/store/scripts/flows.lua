-- Loaded after common.lua: the order of waiting requests, and what their flows (tenant in a band and model) have been served.
-- The counters are those of VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
local PLACE_OFFSET = 4503599627370496 -- 2^52: places with and without it are exact in a double, and never mix
local COUNTER_UNIT = 100 -- a counter grows by so much for a token at weight 1: an integer at every weight
local KEPT_MS = 600000 -- how long the state of an idle flow or model is remembered

local function has_waiting(band, model) return call('EXISTS', waiting_key(band, model)) == 1 end

-- Gives a flow its turn by its counter. A flow that returns from idleness is lifted to the least of those that wait, or to
-- the counter of the last one that was served: it can neither save up service nor be held to what it got long ago.
local function enter_flow(band, model, tenant, is_returning)
  local key = flow_key(band, tenant, model)
  local counter = tonumber(call('HGET', key, 'counter') or '-1')
  if is_returning or counter < 0 then
    local least = call('ZRANGE', flows_key(band, model), 0, 0, 'WITHSCORES')[2]
      or call('HGET', service_key(model), 'virtual:' .. band) or '0'
    counter = math.max(counter, tonumber(least))
    call('HSET', key, 'counter', int(counter))
  end
  call('PERSIST', key)
  call('ZADD', flows_key(band, model), int(counter), tenant)
end

-- Puts a request onto the waiting list of its band and into the line of its flow.
-- rank: -1 for work resumed after a lost worker, 0 for fresh work, 1 for work that a worker has handed back.
local function list(id, band, model, tenant, arrival, rank, turn, is_returning)
  if call('EXISTS', line_key(band, tenant, model)) == 0 then enter_flow(band, model, tenant, is_returning) end
  call('ZADD', line_key(band, tenant, model), int(tonumber(arrival) + tonumber(rank) * PLACE_OFFSET), id)
  call('ZADD', waiting_key(band, model), turn, id)
  call('SADD', MODELS, model)
end

-- Takes a request off its lists. Returns true if it was the last of its band.
local function unlist(id, band, model, tenant)
  call('ZREM', waiting_key(band, model), id)
  call('ZREM', line_key(band, tenant, model), id)
  if call('EXISTS', line_key(band, tenant, model)) == 1 then return false end
  call('ZREM', flows_key(band, model), tenant)
  call('PEXPIRE', flow_key(band, tenant, model), KEPT_MS)
  if has_waiting(band, model) then return false end
  for b = FIRST_BAND, LAST_BAND do
    if has_waiting(b, model) then return true end
  end
  call('SREM', MODELS, model)
  return true
end

-- Adds to a flow's counter. Nothing if the flow has been forgotten.
local function add_to_counter(band, model, tenant, amount)
  local key = flow_key(band, tenant, model)
  if call('EXISTS', key) == 0 then return end
  local counter = call('HINCRBY', key, 'counter', int(amount))
  if call('EXISTS', line_key(band, tenant, model)) == 1 then
    call('ZADD', flows_key(band, model), int(counter), tenant)
  else
    call('PEXPIRE', key, KEPT_MS)
  end
end

-- What so many tokens, already weighted by their kind, add to the counter of a flow.
local function counted(band, model, tenant, tokens)
  local weight = tonumber(call('HGET', flow_key(band, tenant, model), 'weight') or '1')
  return math.floor(tokens * COUNTER_UNIT / weight + 0.5)
end

-- Notes tokens served to a band for the bands below the first that wait behind a waiting higher one: "all" is what was served
-- while they waited, "own" what they got of it. Dispatch compares the two with their share.
local function note_service(band, model, tokens)
  local is_contended = false
  for b = FIRST_BAND, LAST_BAND do
    local is_waiting = has_waiting(b, model)
    if is_contended then
      if is_waiting then call('HINCRBY', service_key(model), 'all:' .. b, int(tokens)) end
      if b == tonumber(band) then call('HINCRBY', service_key(model), 'own:' .. b, int(1000 * tokens)) end
    end
    is_contended = is_contended or is_waiting
  end
  call('PEXPIRE', service_key(model), KEPT_MS)
end

-- One request less of a band runs.
local function count_stopped(band, model)
  if call('HINCRBY', service_key(model), 'running:' .. band, -1) <= 0 then
    call('HDEL', service_key(model), 'running:' .. band)
  end
  call('PEXPIRE', service_key(model), KEPT_MS)
end

-- Removes every key and field of a request, in whatever state it is.
local function remove_request(id)
  local owner, band, model, tenant, worker =
    unpack(call('HMGET', request_key(id), 'owner', 'band', 'model', 'tenant', 'worker'))
  if not owner then return end
  if worker == '' then
    unlist(id, band, model, tenant)
  else
    drop_claim(id, worker)
    count_stopped(band, model)
  end
  call('SREM', owned_key(owner), id)
  call('DEL', request_key(id))
end

local RANKS = { first = '-1', last = '1' }

-- Undoes the present claim of a request: it waits again, at its own "same" place in its flow, or at the "first" or "last" one,
-- which is for good. One whose worker did nothing for it gets back what the claim has added to its flow's counter.
local function undo_claim(id, place)
  local key = request_key(id)
  local band, model, tenant, worker, arrival, rank, turn, charged, tokens = unpack(call('HMGET', key, 'band', 'model',
    'tenant', 'worker', 'arrival', 'rank', 'turn', 'charged', 'charged_tokens'))
  drop_claim(id, worker)
  count_stopped(band, model)
  call('HSET', key, 'worker', '', 'epoch', '')
  if place ~= 'same' then
    rank, turn = RANKS[place], int(call('INCR', SEQUENCE))
    call('HSET', key, 'rank', rank, 'turn', turn, 'waiting_since', int(NOW))
  elseif rank == '0' then
    add_to_counter(band, model, tenant, -tonumber(charged))
    note_service(band, model, -tonumber(tokens))
    call('HSET', key, 'charged', '0', 'charged_tokens', '0')
  end
  list(id, band, model, tenant, arrival, rank, turn, false)
end
