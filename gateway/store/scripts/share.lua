-- Charges what a gateway has admitted from its shares of tenants' limits, or what the store has lost, and renews the shares.
-- ARGV: 2 gateway, 3 microseconds for which it uses them, 4 thousandths of what is unused of a limit that all gateways may
--       hold together, 5 microseconds of the lease of a concurrency slot; then for each tenant: tenant, number of this call,
--       the limits, -1 for none: requests per minute, tokens per minute, concurrent requests, tokens per day, requests at
--       once; microseconds that its day is ahead of UTC, what the gateway holds of the first four limits, number of uses;
--       for each of these: number of the call that told it first, request id, microseconds since it was admitted, requests,
--       tokens, "running" or "ended", or "window" or "day" for sums that count only there
-- Returns for each tenant what the gateway holds of each limit from now on; nothing instead if a later call came before, or
-- while the store may not count all that it should: the gateway then goes on with what it held.
local gateway, lease, part, slot_lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local is_settled = tonumber(call('HGET', STATE, 'settled_at') or '0') <= NOW
local cursor = 6
local function next_argument()
  cursor = cursor + 1
  return ARGV[cursor - 1]
end
local function next_numbers(count)
  local numbers = {}
  for i = 1, count do numbers[i] = tonumber(next_argument()) end
  return numbers
end

local function charge(tenant, offset, charged)
  local batch, id, ago, requests, tokens, state = tonumber(next_argument()), next_argument(), tonumber(next_argument()),
    tonumber(next_argument()), tonumber(next_argument()), next_argument()
  return function()
    local slot, day = math.floor((NOW - ago) / SLOT), math.floor((NOW - ago + offset) / DAY)
    if id ~= '' and call('EXISTS', reservation_key(id)) == 1 then
      if state == 'ended' then settle(tenant, id, tokens) else lease_slot(tenant, id, slot_lease) end
      return
    end
    if batch <= charged then return end
    if state ~= 'day' then count_in_window(tenant, slot, requests, tokens) end
    if state ~= 'window' then count_in_day(tenant, day, tokens) end
    if state == 'running' then
      write_reservation(id, gateway, tokens, slot, day)
      lease_slot(tenant, id, slot_lease)
    end
  end
end

-- The new share: a part of what neither use nor other gateways have. Until the gateway knows it, the old one counts too.
local function grant(tenant, limits, burst, day, held, others)
  local num_gateways = math.max(call('ZCOUNT', GATEWAYS, '(' .. int(NOW), '+inf'), 1)
  local is_recalled = tonumber(call('ZSCORE', RECALLED, tenant) or '0') > NOW
  local used = read_used(tenant, read_window(tenant), day)
  local granted, set_aside = {}, {}
  for i, limit in ipairs(limits) do
    local unused = math.max(limit - used[i], 0)
    local share = math.floor(unused * part / 1000 / num_gateways)
    if i == 1 and burst >= 0 then share = math.min(share, math.floor(burst * part / 1000 / num_gateways)) end
    if is_recalled then share = 0 end
    granted[i] = limit < 0 and 0 or math.min(share, math.max(unused - others[i], 0))
    set_aside[i] = math.max(granted[i], held[i])
  end
  return granted, set_aside
end

local function renew_share()
  local tenant, number, limits = next_argument(), tonumber(next_argument()), next_numbers(4)
  local burst, offset = tonumber(next_argument()), tonumber(next_argument())
  local held, charges = next_numbers(4), {}
  local day = math.floor((NOW + offset) / DAY)
  local shares = read_shares(tenant, day, slot_lease)
  local mine = shares[gateway] or { number = 0, charged = 0 }
  for i = 1, tonumber(next_argument()) do charges[i] = charge(tenant, offset, mine.charged) end
  if number <= mine.number then return {} end
  for _, run in ipairs(charges) do run() end
  for other, share in pairs(shares) do
    if share.is_over and other ~= gateway then call('HDEL', shares_key(tenant), other) end
  end
  local granted, set_aside = {}, held
  if is_settled then granted, set_aside = grant(tenant, limits, burst, day, held, sum_shares(shares, gateway)) end
  write_share(tenant, gateway, { until_time = NOW + lease, number = number, charged = number, amounts = set_aside,
    day = math.floor((NOW + offset + lease + SHARE_TAIL) / DAY) })
  return granted
end

local answers = {}
while cursor <= #ARGV do answers[#answers + 1] = renew_share() end
return answers
