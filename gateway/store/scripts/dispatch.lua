-- Takes in workers' reports, then claims requests in policy order while some worker has credit.
-- ARGV: 2 caller, 3 microseconds that a report is good for, 4 microseconds of a claim's lease, 5 how often a head that does
--       not fit may be overtaken, 6 how many heads that do not fit where there is credit are looked past, 7 and 8 weights of an input and an output
--       token, 9 and 10 least shares of the second and third band in thousandths, 11 weighted tokens that a band is owed at
--       most, 12 microseconds after which a wait is long, 13 how many claims go by before one more goes to the longest wait,
--       14 and 15 thousandths of a worker that the second and third band leave free for higher ones when they get more than
--       their share, 16 thousandths of a worker by which it counts as freer that has all of a request's input cached,
--       17 number of reports; then for each report: worker, epoch, seq, model, block size, blocks, slots, free
--       slots, free blocks, number of accounted claims, and for each of these: request id, attempt
-- Returns a list of claims {request id, owner, worker, epoch, attempt}. Claims of other owners are in their inboxes too.
local caller, report_ttl, lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local max_overtakes, max_passed = tonumber(ARGV[5]), tonumber(ARGV[6])
local input_weight, output_weight = tonumber(ARGV[7]), tonumber(ARGV[8])
local shares, max_owed = { [2] = tonumber(ARGV[9]), [3] = tonumber(ARGV[10]) }, tonumber(ARGV[11])
local long_wait, claims_between = tonumber(ARGV[12]), tonumber(ARGV[13])

local headrooms = { 0, tonumber(ARGV[14]), tonumber(ARGV[15]) }
local ENTITLED = 0 -- the headroom of claims by share or by wait

local prefix_weight = tonumber(ARGV[16]) / 1000

local cursor = 18
local function next_argument()
  cursor = cursor + 1
  return ARGV[cursor - 1]
end

local claims, living = {}, {}

local function owner_lives(owner)
  if living[owner] == nil then living[owner] = is_alive(owner) or false end
  return living[owner]
end

-- What a model's bands have been served. `owed`: thousandths of weighted tokens that a band lacks of its least share.
local function read_service(model, credits)
  local fields = call('HMGET', service_key(model), 'since_longest', 'virtual:1', 'running:1', 'all:1', 'own:1',
    'virtual:2', 'running:2', 'all:2', 'own:2', 'virtual:3', 'running:3', 'all:3', 'own:3')
  local function field(n) return tonumber(fields[n] or '0') end
  local slots = 0
  for _, credit in ipairs(credits) do slots = slots + credit.max_num_seqs end
  local service = { since_longest = field(1), bands = {} }
  for b = FIRST_BAND, LAST_BAND do
    local share, at = shares[b] or 0, 4 * b - 2
    local band = { virtual = field(at), running = field(at + 1), share = share, is_waiting = has_waiting(b, model) }
    band.owed = math.max(math.min(field(at + 2) * share - field(at + 3), max_owed * 1000), -max_owed * 1000)
    if not band.is_waiting then band.owed = math.min(band.owed, 0) end
    band.max_running = math.max(math.floor(share * slots / 1000), 1)
    service.bands[b] = band
  end
  return service
end

local function write_service(model, service)
  local fields = { 'since_longest', int(service.since_longest) }
  for b, band in ipairs(service.bands) do
    for name, value in pairs({ virtual = band.virtual, running = band.running, all = 0, own = 0 - band.owed }) do
      fields[#fields + 1] = name .. ':' .. b
      fields[#fields + 1] = int(value)
    end
  end
  call('HSET', service_key(model), unpack(fields))
  call('PEXPIRE', service_key(model), KEPT_MS)
end

-- Calls `visit` with each band that waits behind a waiting higher one, or would if it had something waiting.
local function each_contended(service, visit)
  local is_contended = false
  for b, band in ipairs(service.bands) do
    if is_contended then visit(b, band) end
    is_contended = is_contended or band.is_waiting
  end
end

-- The claim's input counts for the flow and for the shares of bands, once in the life of a request.
local function charge(request, service)
  local band, tokens = request.band, input_weight * request.input_tokens
  local amount = counted(band, request.model, request.tenant, tokens)
  add_to_counter(band, request.model, request.tenant, amount)
  call('HSET', request_key(request.id), 'charged', int(amount), 'charged_tokens', int(tokens))
  each_contended(service, function(b, its)
    if its.is_waiting then its.owed = its.owed + tokens * its.share end
    if b == band then its.owed = its.owed - tokens * 1000 end
  end)
end

local function claim(request, credit, service)
  local id, attempt, blocks = request.id, int(request.attempt + 1), blocks_for(request.tokens, credit)
  credit.slots = credit.slots - 1
  credit.blocks = credit.blocks - blocks
  unlist(id, request.band, request.model, request.tenant)
  if request.charged == 0 then charge(request, service) end
  local band = service.bands[request.band]
  band.running = band.running + 1
  band.is_waiting = has_waiting(request.band, request.model)
  call('HSET', request_key(id), 'worker', credit.id, 'epoch', credit.epoch, 'attempt', attempt, 'overtaken', '0')
  call('HSET', claims_key(credit.id), id, credit.epoch .. ':' .. attempt .. ':' .. int(blocks))
  call('ZADD', LEASES, int(NOW + lease), id)
  if request.owner ~= caller then
    send(request.owner, 'kind', 'claim', 'request_id', id, 'worker', credit.id, 'epoch', credit.epoch, 'attempt', attempt)
  end
  claims[#claims + 1] = { id, request.owner, credit.id, credit.epoch, attempt }
end

-- One more claim on a worker went past all of these that could have used it; the one whose patience ends now gets a
-- worker kept free.
local function count_overtaking(passed, credits, credit)
  for _, head in ipairs(passed) do
    if reaches(head.owner, credit) then
      head.overtaken = head.overtaken + 1
      head.is_changed = true
      if head.overtaken == max_overtakes then reserve(credits, head) end
    end
  end
end

-- `counter`: of its flow, if it was found by that.
local function read_request(id, band, model, counter)
  local owner, tenant, input_tokens, tokens, attempt, overtaken, charged, cached = unpack(call('HMGET',
    request_key(id), 'owner', 'tenant', 'input_tokens', 'tokens_needed', 'attempt', 'overtaken', 'charged', 'cached'))
  return { id = id, band = band, model = model, counter = counter, owner = owner, tenant = tenant,
    input_tokens = tonumber(input_tokens), tokens = tonumber(tokens), attempt = tonumber(attempt),
    overtaken = tonumber(overtaken), charged = tonumber(charged), cached = cached ~= '' and cjson.decode(cached) or {} }
end

-- The first request of a flow that has not been passed.
local function next_of_flow(walk, band, tenant)
  local line = line_key(band, tenant, walk.model)
  local offset = walk.offsets[line] or 0
  local id = call('ZRANGE', line, offset, offset)[1]
  while id and walk.is_passed[id] do
    offset = offset + 1
    id = call('ZRANGE', line, offset, offset)[1]
  end
  walk.offsets[line] = offset
  return id
end

-- The request of a band that is next by the counters of flows; nil if there is none that has not been passed.
local function find_head(walk, band)
  local rank = 0
  while true do
    local tenant, counter = unpack(call('ZRANGE', flows_key(band, walk.model), rank, rank, 'WITHSCORES'))
    if not tenant then return nil end
    local id = next_of_flow(walk, band, tenant)
    if id then return read_request(id, band, walk.model, tonumber(counter)) end
    rank = rank + 1
  end
end

-- The same, read once until something of the band is claimed, removed or passed.
local function head_of_band(walk, band)
  if walk.heads[band] == nil then walk.heads[band] = find_head(walk, band) or false end
  return walk.heads[band] or nil
end

-- The request that has waited longest, if that is long.
local function longest_waiting(walk)
  local longest, its_band, its_turn
  for b = FIRST_BAND, LAST_BAND do
    local id, turn = unpack(call('ZRANGE', waiting_key(b, walk.model), 0, 0, 'WITHSCORES'))
    if id and (not longest or tonumber(turn) < its_turn) then longest, its_band, its_turn = id, b, tonumber(turn) end
  end
  local is_due = longest and not walk.is_passed[longest]
    and NOW - tonumber(call('HGET', request_key(longest), 'waiting_since')) >= long_wait
  if is_due then return longest, its_band end
  walk.knows_no_long_wait = true
end

-- What a request will use, in weighted tokens, as far as is known.
local function expected_tokens(request)
  return input_weight * request.input_tokens + output_weight * math.max(request.tokens - request.input_tokens, 0)
end

-- The head of a lower band that lacks of its share at least what the request will use.
local function owed_head(walk, service)
  local picked
  each_contended(service, function(b, band)
    if picked or not band.is_waiting or band.owed <= 0 or band.running >= band.max_running then return end
    local request = head_of_band(walk, b)
    if request and band.owed >= math.min(expected_tokens(request), max_owed) * 1000 then picked = request end
  end)
  return picked
end

-- The policy: now and then the longest wait, else a lower band that lacks of its share, else the highest band that finds
-- more free than it must leave for others. Returns a request and the headroom that it must leave.
local function pick(walk, credits, service)
  if service.since_longest >= claims_between and not walk.knows_no_long_wait then
    local id, band = longest_waiting(walk)
    if id then return read_request(id, band, walk.model, nil), ENTITLED end
  end
  local owed = owed_head(walk, service)
  if owed then return owed, ENTITLED end
  for b, band in ipairs(service.bands) do
    local request = band.is_waiting and has_credit(credits, headrooms[b]) and head_of_band(walk, b)
    if request then return request, headrooms[b] end
  end
end

-- Claims a request, or notes that it was passed.
local function consider(request, headroom, walk, credits, service)
  local band = service.bands[request.band]
  walk.heads[request.band] = nil
  if not owner_lives(request.owner) then
    remove_request(request.id)
    band.is_waiting = has_waiting(request.band, request.model)
    return
  end
  local credit = choose(credits, request, headroom, prefix_weight)
  if credit then
    band.virtual = math.max(band.virtual, request.counter or 0)
    service.since_longest = request.counter and service.since_longest + 1 or 0
    claim(request, credit, service)
    count_overtaking(walk.passed, credits, credit)
    walk.num_claims = walk.num_claims + 1
    return
  end
  walk.is_passed[request.id] = true
  if fits_somewhere(credits, request) then
    -- Asked before a worker is kept free for it: that one had credit, too.
    if reaches_credit(credits, request.owner) then walk.num_misfits = walk.num_misfits + 1 end
    if request.overtaken >= max_overtakes then reserve(credits, request) end
    walk.passed[#walk.passed + 1] = request
  end
end

local function dispatch_model(model)
  local credits = read_credits(model, report_ttl)
  if not has_credit(credits, ENTITLED) then return end
  local service = read_service(model, credits)
  local walk = { model = model, passed = {}, is_passed = {}, offsets = {}, heads = {}, num_claims = 0, num_misfits = 0 }
  while has_credit(credits, ENTITLED) and walk.num_misfits < max_passed do
    local request, headroom = pick(walk, credits, service)
    if not request then break end
    consider(request, headroom, walk, credits, service)
  end
  for _, head in ipairs(walk.passed) do
    if head.is_changed then call('HSET', request_key(head.id), 'overtaken', int(head.overtaken)) end
  end
  if walk.num_claims > 0 then write_service(model, service) end
end

for _ = 1, tonumber(ARGV[17]) do take_report(next_argument) end
local models = call('SMEMBERS', MODELS)
table.sort(models)
for _, model in ipairs(models) do dispatch_model(model) end
return claims
