-- Takes in workers' reports, then claims heads in policy order while some worker has credit.
-- ARGV: 2 caller, 3 microseconds that a report is good for, 4 microseconds of a claim's lease, 5 how often a head that does
--       not fit may be overtaken, 6 how many heads that do not fit are looked past, 7 number of reports; then for each report:
--       worker, epoch, seq, model, block size, blocks, slots, free slots, free blocks, number of accounted claims, and for
--       each of these: request id, attempt
-- Returns a list of claims {request id, owner, worker, epoch, attempt}. Claims of other owners are in their inboxes too.
local caller, report_ttl, lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local max_overtakes, max_passed = tonumber(ARGV[5]), tonumber(ARGV[6])
local WORKER_KEPT_MS = 3600000

local cursor = 8
local function next_argument()
  cursor = cursor + 1
  return ARGV[cursor - 1]
end

-- Numbers older than the stored ones are not taken; the same ones again say that the worker lives. Either way the stored
-- numbers then contain the claims that the report accounts for.
local function take_report()
  local worker, epoch, seq, model = next_argument(), next_argument(), next_argument(), next_argument()
  local block_size, num_blocks, max_num_seqs = next_argument(), next_argument(), next_argument()
  local free_slots, free_blocks = next_argument(), next_argument()
  local num_accounted = tonumber(next_argument())
  local stored_epoch, stored_seq = unpack(call('HMGET', worker_key(worker), 'epoch', 'seq'))
  local order = stored_epoch and compare(epoch, stored_epoch) or 1
  if order == 0 then order = compare(seq, stored_seq) end
  if order >= 0 then
    call('HSET', worker_key(worker), 'epoch', epoch, 'seq', seq, 'model', model, 'block_size', block_size,
      'num_blocks', num_blocks, 'max_num_seqs', max_num_seqs, 'free_slots', free_slots, 'free_blocks', free_blocks,
      'reported_at', int(NOW))
    call('PEXPIRE', worker_key(worker), WORKER_KEPT_MS)
    call('SADD', serving_key(model), worker)
    call('PEXPIRE', serving_key(model), WORKER_KEPT_MS)
  end
  for _ = 1, num_accounted do
    local id, attempt = next_argument(), next_argument()
    local claim = call('HGET', claims_key(worker), id)
    if claim and string.match(claim, '^(%d+:%d+):') == epoch .. ':' .. attempt then drop_claim(id, worker) end
  end
end

-- The worker's reported numbers less the claims of its present epoch not yet contained in them; nil if it is silent.
local function read_credit(worker, model)
  local epoch, its_model, block_size, num_blocks, max_num_seqs, slots, blocks, reported_at = unpack(call('HMGET',
    worker_key(worker), 'epoch', 'model', 'block_size', 'num_blocks', 'max_num_seqs', 'free_slots', 'free_blocks',
    'reported_at'))
  if its_model ~= model then
    call('SREM', serving_key(model), worker)
    return nil
  end
  if NOW - tonumber(reported_at) > report_ttl then return nil end
  local credit = {
    id = worker, epoch = epoch, block_size = tonumber(block_size), num_blocks = tonumber(num_blocks),
    max_num_seqs = math.max(tonumber(max_num_seqs), 1), slots = tonumber(slots), blocks = tonumber(blocks),
    is_reserved = false,
  }
  for _, claim in ipairs(call('HVALS', claims_key(worker))) do
    local its_epoch, its_blocks = string.match(claim, '^(%d+):%d+:(%d+)$')
    if its_epoch == epoch then
      credit.slots = credit.slots - 1
      credit.blocks = credit.blocks - tonumber(its_blocks)
    end
  end
  return credit
end

local function read_credits(model)
  local credits = {}
  local workers = call('SMEMBERS', serving_key(model))
  table.sort(workers)
  for _, worker in ipairs(workers) do
    local credit = read_credit(worker, model)
    if credit then credits[#credits + 1] = credit end
  end
  return credits
end

local function has_credit(credits)
  for _, credit in ipairs(credits) do
    if credit.slots > 0 and credit.blocks > 0 and not credit.is_reserved then return true end
  end
  return false
end

local function blocks_for(tokens, credit)
  return math.ceil(tokens / credit.block_size)
end

-- The least loaded worker that can hold so many tokens: most free slots by share, then most free blocks, then first by id.
local function choose(credits, tokens)
  local best
  for _, credit in ipairs(credits) do
    if not credit.is_reserved and credit.slots > 0 and blocks_for(tokens, credit) <= credit.blocks then
      local share = best and credit.slots * best.max_num_seqs - best.slots * credit.max_num_seqs
      if not best or share > 0 or (share == 0 and credit.blocks > best.blocks) then best = credit end
    end
  end
  return best
end

-- Keeps the worker nearest to holding so many tokens free of later work. One that can never hold them is no use.
local function reserve(credits, tokens)
  local best
  for _, credit in ipairs(credits) do
    if not credit.is_reserved and blocks_for(tokens, credit) <= credit.num_blocks then
      if not best or credit.blocks > best.blocks then best = credit end
    end
  end
  if best then best.is_reserved = true end
end

local claims = {}

local function claim(id, band, model, owner, attempt, tokens, credit)
  local blocks = blocks_for(tokens, credit)
  credit.slots = credit.slots - 1
  credit.blocks = credit.blocks - blocks
  unlist(id, band, model)
  call('HSET', request_key(id), 'worker', credit.id, 'epoch', credit.epoch, 'attempt', attempt, 'overtaken', '0')
  call('HSET', claims_key(credit.id), id, credit.epoch .. ':' .. attempt .. ':' .. int(blocks))
  call('ZADD', LEASES, int(NOW + lease), id)
  if owner ~= caller then
    send(owner, 'kind', 'claim', 'request_id', id, 'worker', credit.id, 'epoch', credit.epoch, 'attempt', attempt)
  end
  claims[#claims + 1] = { id, owner, credit.id, credit.epoch, attempt }
end

-- One more claim went past all of these; the one whose patience ends now gets a worker kept free.
local function count_overtaking(passed, credits)
  for _, head in ipairs(passed) do
    head.overtaken = head.overtaken + 1
    head.is_changed = true
    if head.overtaken == max_overtakes then reserve(credits, head.tokens) end
  end
end

local function fits_somewhere(credits, tokens)
  for _, credit in ipairs(credits) do
    if blocks_for(tokens, credit) <= credit.num_blocks then return true end
  end
  return false
end

-- Looks at one waiting request: claims it, or notes it among those passed. Returns false if it stays where it is.
local function consider(id, band, model, credits, passed)
  local owner, tokens_text, attempt, overtaken =
    unpack(call('HMGET', request_key(id), 'owner', 'tokens_needed', 'attempt', 'overtaken'))
  if not is_alive(owner) then
    remove_request(id)
    return true
  end
  local tokens = tonumber(tokens_text)
  local credit = choose(credits, tokens)
  if credit then
    claim(id, band, model, owner, int(tonumber(attempt) + 1), tokens, credit)
    count_overtaking(passed, credits)
    return true
  end
  if fits_somewhere(credits, tokens) then
    local head = { id = id, tokens = tokens, overtaken = tonumber(overtaken), is_changed = false }
    if head.overtaken >= max_overtakes then reserve(credits, tokens) end
    passed[#passed + 1] = head
  end
  return false
end

local function dispatch_model(model)
  local credits = read_credits(model)
  local passed = {}
  for band = FIRST_BAND, LAST_BAND do
    local offset = 0
    while has_credit(credits) and #passed < max_passed do
      local id = call('ZRANGE', waiting_key(band, model), offset, offset)[1]
      if not id then break end
      if not consider(id, band, model, credits, passed) then offset = offset + 1 end
    end
  end
  for _, head in ipairs(passed) do
    if head.is_changed then call('HSET', request_key(head.id), 'overtaken', int(head.overtaken)) end
  end
end

for _ = 1, tonumber(ARGV[7]) do take_report() end
local models = call('SMEMBERS', MODELS)
table.sort(models)
for _, model in ipairs(models) do dispatch_model(model) end
return claims
