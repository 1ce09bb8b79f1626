-- Loaded in front of dispatch: workers' reports, and what they leave to give away.
local WORKER_KEPT_MS = 3600000

-- Numbers older than the stored ones are not taken; the same ones again say that the worker lives. Either way the stored
-- numbers then contain the claims that the report accounts for.
local function take_report(next_argument)
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
local function read_credit(worker, model, report_ttl)
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

local function read_credits(model, report_ttl)
  local credits = {}
  local workers = call('SMEMBERS', serving_key(model))
  table.sort(workers)
  for _, worker in ipairs(workers) do
    local credit = read_credit(worker, model, report_ttl)
    if credit then credits[#credits + 1] = credit end
  end
  return credits
end

local function blocks_for(tokens, credit)
  return math.ceil(tokens / credit.block_size)
end

-- Can the worker hold so many blocks more, and still have a headroom, in thousandths of its slots and blocks, left for
-- higher bands? What only just fits into the worker need leave nothing.
local function can_hold(credit, blocks, headroom)
  local kept_slots = math.min(math.floor(credit.max_num_seqs * headroom / 1000 + 0.5), credit.max_num_seqs - 1)
  local kept_blocks = math.min(math.floor(credit.num_blocks * headroom / 1000 + 0.5), math.max(credit.num_blocks - blocks, 0))
  return not credit.is_reserved and credit.slots > kept_slots and blocks + kept_blocks <= credit.blocks
end

local function has_credit(credits, headroom)
  for _, credit in ipairs(credits) do
    if can_hold(credit, 1, headroom) then return true end
  end
  return false
end

local reached_by = {}

-- Can the gateway submit to the worker? One that has not said which ones it can is taken to reach all.
local function reaches(gateway, credit)
  local reached = reached_by[gateway]
  if reached == nil then
    reached = {}
    for _, worker in ipairs(call('SMEMBERS', reached_key(gateway))) do reached[worker] = true end
    reached_by[gateway] = reached
  end
  return next(reached) == nil or reached[credit.id] == true
end

-- Does some worker that a gateway can submit to have credit?
local function reaches_credit(credits, gateway)
  for _, credit in ipairs(credits) do
    if can_hold(credit, 1, 0) and reaches(gateway, credit) then return true end
  end
  return false
end

-- How good a place the worker is: the scarcer of its slots and blocks, as the share that is free, and so much more as it is
-- believed to have of the input. So nothing that is cached makes up for more than `prefix_weight` of load.
local function score(credit, request, prefix_weight)
  local free = math.min(credit.slots / credit.max_num_seqs, credit.blocks / credit.num_blocks)
  local cached = request.cached[credit.id]
  if not cached then return free end
  return free + prefix_weight * math.min(cached * credit.block_size / request.input_tokens, 1)
end

-- The best place of those that can hold a request and are reached by its owner: by score, then by free blocks, then by id.
local function choose(credits, request, headroom, prefix_weight)
  local best, best_score
  for _, credit in ipairs(credits) do
    if can_hold(credit, blocks_for(request.tokens, credit), headroom) and reaches(request.owner, credit) then
      local its_score = score(credit, request, prefix_weight)
      if not best or its_score > best_score or (its_score == best_score and credit.blocks > best.blocks) then
        best, best_score = credit, its_score
      end
    end
  end
  return best
end

-- Could the worker hold the request if it were empty?
local function can_ever_hold(credit, request)
  return blocks_for(request.tokens, credit) <= credit.num_blocks and reaches(request.owner, credit)
end

-- Keeps the worker nearest to holding a request free of later work. One that can never hold it is no use.
local function reserve(credits, request)
  local best
  for _, credit in ipairs(credits) do
    if not credit.is_reserved and can_ever_hold(credit, request) then
      if not best or credit.blocks > best.blocks then best = credit end
    end
  end
  if best then best.is_reserved = true end
end

local function fits_somewhere(credits, request)
  for _, credit in ipairs(credits) do
    if can_ever_hold(credit, request) then return true end
  end
  return false
end
