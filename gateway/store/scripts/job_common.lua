-- Loaded in front of every script of jobs: key names, states, the time.
-- KEYS: 1 jobs that are due. ARGV[1]: the pool's prefix; the scripts' own arguments follow.
local DUE, PREFIX = KEYS[1], ARGV[1]
local WAITING, RUNNING, CANCELLED = '1', '2', '5'
local call = redis.call

local function job_key(tenant, id) return PREFIX .. 'job:' .. tenant .. '/' .. id end
local function list_key(tenant) return PREFIX .. 'jobs:' .. tenant end
local function int(number) return string.format('%.0f', number) end

local time = call('TIME')
local NOW = tonumber(time[1]) * 1000000 + tonumber(time[2])

-- Is that the job's present run?
local function is_running(tenant, id, run)
  local state, its_run = unpack(call('HMGET', job_key(tenant, id), 'state', 'runs'))
  return state == RUNNING and its_run == run
end

local function end_job(tenant, id, ttl_ms, ...)
  call('HSET', job_key(tenant, id), 'ended_at', int(NOW), ...)
  call('HDEL', job_key(tenant, id), 'request')
  call('PEXPIRE', job_key(tenant, id), ttl_ms)
  call('ZREM', DUE, tenant .. '/' .. id)
end
