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

-- The least loaded worker that can hold so many tokens: most free slots by share, then most free blocks, then first by id.
local function choose(credits, tokens, headroom)
  local best
  for _, credit in ipairs(credits) do
    if can_hold(credit, blocks_for(tokens, credit), headroom) then
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

local function fits_somewhere(credits, tokens)
  for _, credit in ipairs(credits) do
    if blocks_for(tokens, credit) <= credit.num_blocks then return true end
  end
  return false
end
